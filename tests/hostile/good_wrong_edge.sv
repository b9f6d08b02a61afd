// Prob041_dff8r: mismatch
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk or posedge reset) if (reset) q <= 0; else q <= d;
endmodule
