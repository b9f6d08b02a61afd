// Prob041_dff8r: pass
package sizes;
  localparam int W = 8;
  typedef logic [W-1:0] word;
endpackage
module TopModule (input clk, input reset, input [7:0] d, output [7:0] q);
  import sizes::*;
  word held;
  always_ff @(posedge clk) held <= reset ? {W{1'b0}} : d;
  assign q = held;
endmodule
