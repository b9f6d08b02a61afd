// Prob041_dff8r: pass
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  localparam N = $clog2(256);
  wire [N-1:0] s = $unsigned($signed(d));
  wire [3:0] ones = $countones(d) + $bits(d) - 8;
  always @(posedge clk) q <= reset ? 0 : s;
endmodule
