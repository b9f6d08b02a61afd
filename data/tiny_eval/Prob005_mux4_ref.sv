module RefModule (
  input [1:0] in0,
  input [1:0] in1,
  input [1:0] in2,
  input [1:0] in3,
  input [1:0] sel,
  output reg [1:0] z
);
  always @(*)
    case (sel)
      0: z = in0;
      1: z = in1;
      2: z = in2;
      default: z = in3;
    endcase
endmodule
