"""A TTGIR for tests of layouts."""

# Of a product's right operand, which is turned on the way to shared memory: as jtile's float32 products on Hopper are.
TTGIR = """\
#blocked = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [2, 16], warpsPerCTA = [4, 1], order = [1, 0]}>
#mma = #ttg.nvidia_mma<{versionMajor = 3, versionMinor = 0, warpsPerCTA = [4, 1], instrShape = [16, 64, 8]}>
#shared = #ttg.nvmma_shared<{swizzlingByteWidth = 64, transposed = true, elementBitWidth = 32}>
#shared1 = #ttg.swizzled_shared<{vec = 4, perPhase = 2, maxPhase = 4, order = [1, 0]}>
#smem = #ttg.shared_memory
module attributes {"ttg.num-warps" = 4 : i32, "ttg.threads-per-warp" = 32 : i32} {
  tt.func public @f(%arg0: !tt.ptr<f32>) {
    %0 = tt.load %arg1 : tensor<16x64x!tt.ptr<f32>, #blocked>
    %1 = ttg.local_alloc : () -> !ttg.memdesc<3x16x64xf32, #shared1, #smem, mutable>
    %2 = ttg.async_copy_global_to_local %3, %4 : tensor<16x64x!tt.ptr<f32>, #blocked> -> <16x64xf32, #shared1, #smem>
    %5 = ttg.local_alloc %0 : (tensor<16x64xf32, #blocked>) -> !ttg.memdesc<16x64xf32, #shared, #smem>
    %6 = ttg.local_alloc %0 : (tensor<16x64xf32, #blocked>) -> !ttg.memdesc<16x64xf32, #shared, #smem>
    %7 = ttng.warp_group_dot %5, %6, %8 : !ttg.memdesc<16x64xf32, #shared, #smem> -> tensor<64x64xf32, #mma>
    %9 = ttg.convert_layout %7 : tensor<64x64xf32, #mma> -> tensor<64x64xf32, #ttg.odd<{a = 1}>>
    %10 = "tt.reduce"(%9) : (tensor<64x64xf32, #mma>) -> tensor<64xf32, #ttg.slice<{dim = 1, parent = #mma}>>
  }
}"""
