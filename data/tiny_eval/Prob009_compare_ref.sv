module RefModule (
  input [23:0] d0,
  input [23:0] d1,
  output yes
);
  assign yes = d0 == d1;
endmodule
