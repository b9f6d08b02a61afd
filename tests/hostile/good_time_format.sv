// Prob041_dff8r: pass
`timescale 1ns / 1ps
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  initial begin
    $timeformat(-9, 1, " ns", 8);
    $printtimescale;
  end
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
