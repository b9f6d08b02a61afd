// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  localparam [8*20-1:0] NOTE = "endmodule // $finish;";
  reg [8*8-1:0] other = "module x";
  always @(posedge clk) if (reset) q <= 0; else q <= d;
endmodule
