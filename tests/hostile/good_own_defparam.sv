// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output [7:0] q);
  Register r(clk, reset, d, q);
  defparam r.W = 8;
endmodule
module Register #(parameter W = 1) (input clk, input clear, input [W-1:0] d, output reg [W-1:0] q);
  always @(posedge clk) q <= clear ? {W{1'b0}} : d;
endmodule
