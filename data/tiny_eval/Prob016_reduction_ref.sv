module RefModule (
  input [4:0] word,
  output z
);
  assign z = |word;
endmodule
