// Prob041_dff8r
`timescale 1 ps/1 ps
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  initial #7 $finish;
endmodule
