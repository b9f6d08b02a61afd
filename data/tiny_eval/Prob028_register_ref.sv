module RefModule (
  input clk,
  input rst_n,
  input enable,
  input [9:0] d,
  output reg [9:0] dout
);
  always @(posedge clk)
    if (!rst_n) dout <= 0;
    else if (enable) dout <= d;
endmodule
