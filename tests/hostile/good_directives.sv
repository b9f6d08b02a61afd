// Prob041_dff8r: pass
`timescale 1ns / 1ps
`default_nettype none
module TopModule(input wire clk, input wire reset, input wire [7:0] d, output reg [7:0] q);
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
`default_nettype wire
