module RefModule (
  input [7:0] value,
  output [3:0] high,
  output [3:0] low
);
  assign high = value[7:4];
  assign low = value[3:0];
endmodule
