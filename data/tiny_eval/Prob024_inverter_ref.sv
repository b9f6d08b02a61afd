module RefModule (
  input [3:0] x,
  input neg,
  output [3:0] o
);
  assign o = neg ? ~x : x;
endmodule
