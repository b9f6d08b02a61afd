module RefModule (
  input clk,
  input reset_n,
  input [5:0] din,
  output reg [5:0] total
);
  always @(posedge clk)
    if (!reset_n) total <= 0;
    else total <= total + din;
endmodule
