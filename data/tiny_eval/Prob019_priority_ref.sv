module RefModule (
  input [2:0] din,
  output reg [1:0] idx
);
  always @(*)
    if (din[0]) idx = 0;
    else if (din[1]) idx = 1;
    else if (din[2]) idx = 2;
    else idx = 0;
endmodule
