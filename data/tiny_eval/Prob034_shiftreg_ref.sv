module RefModule (
  input clk,
  input reset_n,
  input in,
  output reg [3:0] dout
);
  always @(posedge clk)
    if (!reset_n) dout <= 0;
    else dout <= {dout[2:0], in};
endmodule
