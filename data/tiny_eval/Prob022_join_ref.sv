module RefModule (
  input [3:0] left,
  input [3:0] right,
  output [7:0] outp
);
  assign outp = {left, right};
endmodule
