module RefModule (
  input [15:0] vec,
  output [15:0] res
);
  assign res = {vec[0], vec[15:1]};
endmodule
