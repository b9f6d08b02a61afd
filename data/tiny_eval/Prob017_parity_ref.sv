module RefModule (
  input [15:0] data_in,
  output z
);
  assign z = ~^data_in;
endmodule
