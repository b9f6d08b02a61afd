// Prob041_dff8r: mismatch
module TopModule(input clk, input reset, input [7:0] d, output reg [7:0] q);
endmodule
