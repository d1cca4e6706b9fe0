"""What the CAPE and SHAPE papers show about translation models, for any trained model.

text            stacked and swapped sentences
segmentation    text to the subwords of a fairseq model, and back
translators     one interface over the models of both hosts: fairseq_host, huggingface_host
options         what the commands share: options, models, tables, plots
stack length swap similarity scores     one analysis each
corpora         the training data of SHAPE from any corpus
"""
