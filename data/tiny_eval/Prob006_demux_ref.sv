module RefModule (
  input [7:0] data_in,
  input sel,
  output [7:0] y0,
  output [7:0] y1
);
  assign y0 = sel ? 0 : data_in;
  assign y1 = sel ? data_in : 0;
endmodule
