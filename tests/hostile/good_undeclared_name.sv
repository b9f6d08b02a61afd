// Prob041_dff8r: compile
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  always @(posedge clk) q <= reset ? 0 : data;
endmodule
