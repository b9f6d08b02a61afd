// Prob022_mux2to1: pass
module TopModule(input a, b, sel, output out);
  wire n, x, y;
  not (n, sel); and (x, a, n); and (y, b, sel); or (out, x, y);
endmodule
