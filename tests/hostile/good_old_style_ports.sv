// Prob041_dff8r: pass
module TopModule(clk, reset, d, q);
  input clk;
  input reset;
  input [7:0] d;
  output [7:0] q;
  reg [7:0] q;
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
