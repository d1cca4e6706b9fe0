"""Speech recognition in fairseq: task, models, criterion, decoding and error rates. Importing this
package registers all of them."""

from fairseq_user_dir.asr import criterion, ctc_model, s2t_model, scoring, seq2seq_model, task

__all__ = ["criterion", "ctc_model", "s2t_model", "scoring", "seq2seq_model", "task"]
