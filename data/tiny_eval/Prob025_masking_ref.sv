module RefModule (
  input [5:0] data,
  input run,
  output [5:0] result
);
  assign result = run ? data : 0;
endmodule
