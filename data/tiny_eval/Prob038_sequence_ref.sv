module RefModule (
  input clk,
  input rst_n,
  input data,
  output o
);
  reg [2:0] hist;
  always @(posedge clk)
    if (!rst_n) hist <= 0;
    else hist <= {hist[1:0], data};
  assign o = hist == 3'b011;
endmodule
