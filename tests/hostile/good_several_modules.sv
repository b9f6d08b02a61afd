// Prob041_dff8r: pass
module Flop(input clk, input clear, input d, output reg q);
  always @(posedge clk) if (clear) q <= 1'b0; else q <= d;
endmodule
module TopModule(input clk, input reset, input [7:0] d, output [7:0] q);
  Flop flops [7:0] (.clk(clk), .clear(reset), .d(d), .q(q));
endmodule
