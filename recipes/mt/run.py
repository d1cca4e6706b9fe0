"""The translation recipes of the CAPE and SHAPE papers: one program, a recipe is a row of catalog.py.

    python -m recipes.mt.run wmt14_en_de prepare --train train.en train.de --valid ... --test ...
    python -m recipes.mt.run wmt14_en_de train select decode score
    python -m recipes.mt.run wmt14_en_de train select decode score --position-embedding sinpos
    python -m recipes.mt.run wmt14_en_de all --sample           a minute on a CPU, built-in data

Stages: prepare (text to binary data), train, select (best epoch by validation BLEU, or average of
the last checkpoints), decode (test sets), score (sacreBLEU, and BLEU of tokens as in the papers).
The position embedding is a flag; flags this program does not know go to fairseq-train, where they
win over those of the recipe. Finished work is reused, interrupted training goes on.
"""
