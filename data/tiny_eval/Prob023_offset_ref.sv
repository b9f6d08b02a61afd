module RefModule (
  input [5:0] data,
  output [5:0] ans
);
  assign ans = data + 9;
endmodule
