// Prob022_mux2to1: pass
primitive choose(o, a, b, s);
  output o; input a, b, s;
  table
    0 ? 0 : 0;
    1 ? 0 : 1;
    ? 0 1 : 0;
    ? 1 1 : 1;
  endtable
endprimitive
module TopModule(input a, input b, input sel, output out);
  choose c(out, a, b, sel);
endmodule
