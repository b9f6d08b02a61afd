module RefModule (
  input [2:0] d0,
  input [2:0] d1,
  output [2:0] z
);
  assign z = d0 - d1;
endmodule
