"""Problems, answers, a judge and scores for Verilog."""
