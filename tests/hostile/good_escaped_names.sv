// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  wire [7:0] \d&~reset ;
  assign \d&~reset  = reset ? 8'd0 : d;
  always @(posedge clk) \q  <= \d&~reset ;
endmodule
