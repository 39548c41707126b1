/* SPDX-License-Identifier: Apache-2.0
 *
 * Reads that the kernel carries out by itself (io_uring), called from Python by ctypes. Many containers
 * forbid io_uring and old kernels lack it: ft_client_reads_open says so, and the caller then reads with
 * threads.
 *
 * One queue belongs to one thread. The memory of a read must stay until ft_client_reads_wait has returned its
 * tag; ft_client_reads_close waits for what is still under way.
 */
#pragma once
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* A queue of up to `depth` (1 to 256) reads at a time. NULL where there is none; the reason (errno) is in
 * *error. */
void* ft_client_reads_open(uint32_t depth, int* error);

/* Begins to read `bytes` (up to 1 GiB) from `offset` of file `fd` on into `to`. Returns 0, or an errno: EBUSY
 * when `depth` reads are under way. */
int ft_client_reads_begin(void* queue, int fd, uint64_t offset, void* to, uint32_t bytes, uint64_t tag);

/* Waits until one of the reads under way, of which there must be one, has ended: its tag, and in *result the
 * bytes it brought, which may be fewer than wanted, or a negative errno. The kernel always ends a read; the
 * call itself cannot fail but by misuse, which aborts the process. */
void ft_client_reads_wait(void* queue, uint64_t* tag, int32_t* result);

/* Waits for all reads and frees the queue. */
void ft_client_reads_close(void* queue);

#ifdef __cplusplus
}
#endif
