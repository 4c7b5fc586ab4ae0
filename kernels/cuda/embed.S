// A file of kernels as an array: NAME, FILE.
  .section .rodata
  .balign 64
  .globl NAME
  .hidden NAME
NAME:
  .incbin FILE
  .section .note.GNU-stack, "", %progbits
