// Runs in the answer's place, with testbench and reference, once per problem: notes the inputs, at
// each edge of a bit as a flip-flop sees them, else when a change has settled.
module TopModule(@ports@);@unit@
  integer file = $fopen("questions.txt", "w");
  initial begin @note@ @ever@ begin @at_ins@ #0 @note@ end end
  @at_edges@
  final @note@
endmodule
