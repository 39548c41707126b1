// SPDX-License-Identifier: Apache-2.0
//
// A real cpu_worker process on a real ring: jobs, bad jobs, commands, death and resumption, naps, sleep and
// wake.
//
// usage: protocol_test PATH_OF_CPU_WORKER
#include <fcntl.h>
#include <time.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>

#include "worker_process.h"

using namespace testing;

namespace {

void pause_us(uint64_t us) { usleep(useconds_t(us)); }

void jobs_run_and_are_counted() {
  Server s;
  Worker worker(s.ring);
  worker.wait_ready();
  for (uint32_t rows : {1u, 5u, 64u, 2u}) {
    s.ring_job(rows);
    CHECK(s.wait() == 0);
    s.check_results("plain");
  }
  const ft_block& block = s.ring.block(s.seq);
  CHECK(block.started_ns >= block.rung_ns && block.finished_ns >= block.started_ns);
  CHECK(block.experts >= 1 && block.bytes == block.experts * uint64_t(4 * 3 * 48 * 32), block.bytes);
  const ft_stats& stats = s.ring.header().stats;
  CHECK(stats.jobs == 4 && stats.failed_jobs == 0 && stats.rows == 72, stats.jobs, " ", stats.rows);
  CHECK(s.ring.header().progress > 0 && s.ring.header().worker_threads == 2);
}

void jobs_may_be_rung_ahead() {
  Server s(50'000, 3);
  Worker worker(s.ring);
  worker.wait_ready();
  kill(worker.pid, SIGSTOP);
  for (int i = 0; i < 3; i++) s.ring_job(3);
  kill(worker.pid, SIGCONT);
  CHECK(s.wait() == 0);
  s.check_results("rung ahead");
  for (uint64_t seq = 1; seq <= 3; seq++) CHECK(s.ring.block(seq).done == seq, seq);
}

void bad_jobs_end_with_a_status() {
  Server s;
  Worker worker(s.ring);
  worker.wait_ready();
  CHECK(s.status_of([](ft_block& b) { b.layer = 1; }) == FT_ERR_LAYER);
  CHECK(s.status_of([](ft_block& b) { b.layer = UINT32_MAX; }) == FT_ERR_LAYER);
  CHECK(s.status_of([](ft_block& b) { b.rows = 0; }) == FT_ERR_SHAPE);
  CHECK(s.status_of([](ft_block& b) { b.rows = 65; }) == FT_ERR_SHAPE);
  CHECK(s.status_of([](ft_block& b) { b.rows = UINT32_MAX; }) == FT_ERR_SHAPE);
  CHECK(s.status_of([](ft_block& b) { b.topk = 0; }) == FT_ERR_SHAPE);
  CHECK(s.status_of([](ft_block& b) { b.topk = 5; }) == FT_ERR_SHAPE);
  CHECK(s.status_of([](ft_block& b) { b.row_dtype = 0; }) == FT_ERR_SHAPE);
  CHECK(s.status_of([](ft_block& b) { b.row_dtype = 4; }) == FT_ERR_SHAPE);
  for (int32_t route : {6, -2, INT32_MAX, INT32_MIN}) {
    CHECK(s.status_of([&](ft_block&) { s.ring.routes(s.seq)[4] = route; }) == FT_ERR_ROUTE, route);
    CHECK(s.ring.block(s.seq).status_arg == route);
  }
  for (int32_t expert : {6, -2, INT32_MAX, INT32_MIN})
    CHECK(s.status_of([&](ft_block& b) { b.shared_expert = expert; }) == FT_ERR_SHAPE, expert);
  for (uint32_t begin : {1u, 32u, 64u, UINT32_MAX, UINT32_MAX - 63})
    CHECK(s.status_of([&](ft_block& b) { b.shared_expert = 0, b.shared_begin = begin; }) == FT_ERR_SHAPE,
          begin);
  CHECK(s.status_of([](ft_block& b) { b.shared_begin = UINT32_MAX; }) == FT_OK);
  CHECK(s.ring.header().stats.failed_jobs == 22, s.ring.header().stats.failed_jobs);
  s.ring_job(4);
  CHECK(s.wait() == 0);
  s.check_results("after bad jobs");
}

// Each change of a good layer is refused at attach and at each job, and undone.
void bad_layers_are_refused() {
  Server s;
  Worker worker(s.ring);
  worker.wait_ready();
  const ft_layer good = s.ring.layer(0);
  auto refused = [&](uint32_t status, const std::function<void(ft_layer&)>& spoil) {
    spoil(s.ring.layer(0));
    CHECK(s.command(FT_CMD_ATTACH) == status, s.ring.header().command_status, " instead of ", status);
    CHECK(s.status_of([](ft_block&) {}) == status);
    s.ring.layer(0) = good;
  };
  refused(FT_ERR_FORMAT, [](ft_layer& l) { l.format = 77; });
  refused(FT_ERR_FORMAT, [](ft_layer& l) { l.activation = 5; });
  refused(FT_ERR_FORMAT, [](ft_layer& l) { l.flags = 64; });
  refused(FT_ERR_FORMAT, [](ft_layer& l) { l.flags = FT_LAYER_INTERLEAVED; });
  refused(FT_ERR_FORMAT, [](ft_layer& l) { l.role[FT_ROLE_DOWN].stride = 0; });
  refused(FT_ERR_SHAPE, [](ft_layer& l) { l.hidden = 257; });
  refused(FT_ERR_SHAPE, [](ft_layer& l) { l.intermediate = 0; });
  refused(FT_ERR_SHAPE, [](ft_layer& l) { l.num_experts = 0; });
  refused(FT_ERR_SHAPE, [](ft_layer& l) { l.num_experts = UINT32_MAX; });
  refused(FT_ERR_BOUNDS, [](ft_layer& l) { l.num_experts = 60000; });
  refused(FT_ERR_BOUNDS, [](ft_layer& l) { l.role[FT_ROLE_DOWN].offset = 4 << 20; });
  refused(FT_ERR_BOUNDS, [](ft_layer& l) { l.role[FT_ROLE_DOWN].offset = UINT64_MAX - 63; });
  refused(FT_ERR_BOUNDS, [](ft_layer& l) { l.role[FT_ROLE_DOWN].offset += 2; });
  refused(FT_ERR_BOUNDS, [](ft_layer& l) { l.role[FT_ROLE_GATE_UP].stride = UINT64_MAX / 64 * 64; });
  refused(FT_ERR_BOUNDS, [](ft_layer& l) { l.role[FT_ROLE_GATE_UP].stride = 64; });
  refused(FT_ERR_BOUNDS, [](ft_layer& l) { l.intermediate = 1 << 20; });
  CHECK(s.command(FT_CMD_ATTACH) == FT_OK);
  s.ring_job(4);
  CHECK(s.wait() == 0);
  s.check_results("after bad layers");
}

void commands_answer() {
  Server s;
  Worker worker(s.ring);
  worker.wait_ready();
  CHECK(s.command(99) == FT_ERR_COMMAND && s.ring.header().command_status_arg == 99);
  CHECK(s.command(FT_CMD_MEASURE, 0, 4 << 20, 3) == FT_OK);
  CHECK(s.ring.header().result[0] == 3 * (4 << 20) && s.ring.header().result[1] > 0);
  CHECK(s.command(FT_CMD_MEASURE, 0, (4 << 20) + 64) == FT_ERR_BOUNDS);
  CHECK(s.command(FT_CMD_MEASURE, UINT64_MAX, 64) == FT_ERR_BOUNDS);
  CHECK(s.command(FT_CMD_MEASURE, 64, UINT64_MAX) == FT_ERR_BOUNDS);
  CHECK(s.command(FT_CMD_STOP) == FT_OK);
  int status = worker.wait_exit();
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, status);
  CHECK(s.ring.header().worker_state == FT_WORKER_STOPPED);
}

// A mix of good values, borders and noise in every word of the layer and of the descriptor.
void garbage_is_answered() {
  Server s;
  Worker worker(s.ring);
  worker.wait_ready();
  const ft_layer good = s.ring.layer(0);
  auto noise = [&]() -> uint32_t {
    const uint32_t borders[] = {0, 1, 2, 64, 255, 256, 257, 1u << 20, 1u << 31, UINT32_MAX};
    return s.random() % 4 ? borders[s.random() % std::size(borders)] : uint32_t(s.random());
  };
  auto spoil = [&](void* words, size_t count) {
    for (size_t i = 0; i < count; i++)
      if (s.random() % 8 == 0) static_cast<uint32_t*>(words)[i] = noise();
  };
  uint32_t statuses[FT_ERR_COMMAND + 1] = {};
  for (int i = 0; i < 400; i++) {
    s.ring.layer(0) = good;
    if (i % 2) spoil(&s.ring.layer(0), sizeof(ft_layer) / 4);
    s.command(FT_CMD_ATTACH);
    uint32_t status = s.status_of([&](ft_block& b) {
      spoil(&b.layer, 4);
      spoil(&b.shared_expert, 2);
      spoil(s.ring.routes(s.seq), 6);
    });
    CHECK(status <= FT_ERR_BOUNDS, status);
    if (status <= FT_ERR_BOUNDS) statuses[status]++;
    CHECK(kill(worker.pid, 0) == 0 && waitpid(worker.pid, nullptr, WNOHANG) == 0, "the worker died at round ",
          i);
  }
  for (uint32_t status = FT_OK; status <= FT_ERR_BOUNDS; status++)
    CHECK(statuses[status] > 0, "never seen: ", status);
}

// Killed at random moments of a job; the next worker must finish the same job with the right result.
void killed_workers_resume() {
  Server s(50'000, 2, 256, 192);
  int in_the_middle = 0;
  for (int round = 0; round < 30; round++) {
    Worker first(s.ring, {"--isa", "scalar"});
    if (round % 3) first.wait_ready();
    uint64_t progress = s.ring.header().progress;
    s.ring_job(64);
    pause_us(s.random() % 20'000);
    first.kill_now();
    in_the_middle += s.ring.block(s.seq).done < s.seq && s.ring.header().progress > progress;
    Worker second(s.ring);
    CHECK(s.wait() == 0, "job ", s.seq, " lost");
    s.check_results("resumed");
  }
  printf("killed %d of 30 workers in the middle of a job\n", in_the_middle);
  CHECK(in_the_middle > 0, "no round killed a worker in the middle of its job");
}

// A stopped (hanging) worker: the wait times out, abort ends it, progress stands still.
void stalled_workers_are_noticed() {
  Server s;
  Worker worker(s.ring);
  worker.wait_ready();
  kill(worker.pid, SIGSTOP);
  s.ring_job(8);
  uint64_t progress = s.ring.header().progress, start = ft::now_ns();
  CHECK(s.wait(0, 50 * kMs) == 1);
  CHECK(ft::now_ns() - start >= 50 * kMs && s.ring.header().progress == progress);
  std::thread aborter([&] {
    pause_us(100'000);
    ft_client_abort(s.ring.memory.ring, 1);
  });
  CHECK(s.wait() == 2);
  CHECK(ft::now_ns() - start < 5'000 * kMs);
  aborter.join();
  ft_client_abort(s.ring.memory.ring, 0);
  kill(worker.pid, SIGCONT);
  CHECK(s.wait() == 0);
  s.check_results("after a stall");
}

bool gone(pid_t pid) {
  for (int i = 0; i < 400; i++) {
    if (kill(pid, 0) != 0) return true;
    pause_us(10'000);
  }
  return false;
}

// A middle process starts the worker and dies; the worker must go too, awake or asleep.
void workers_die_with_their_parent() {
  for (uint64_t spin_ns : {0ull, 10'000'000'000ull}) {
    Server s(spin_ns);
    pid_t parent = fork();
    if (parent == 0) {
      Worker::spawn(s.ring, {}, -1);
      pause();
      _exit(0);
    }
    while (ft::shared(s.ring.header().worker_state).load() != FT_WORKER_READY) pause_us(1000);
    pid_t worker = pid_t(s.ring.header().worker_pid);
    CHECK(kill(worker, 0) == 0);
    kill(parent, SIGKILL);
    waitpid(parent, nullptr, 0);
    CHECK(gone(worker), "the worker outlives its parent; spin_ns ", spin_ns);
  }
}

uint64_t cpu_time_ns(pid_t pid) {
  clockid_t clock;
  clock_getcpuclockid(pid, &clock);
  timespec t;
  clock_gettime(clock, &t);
  return uint64_t(t.tv_sec) * ft::kSecond + uint64_t(t.tv_nsec);
}

void idle_workers_sleep() {
  Server s(200'000);
  Worker worker(s.ring);
  worker.wait_ready();
  s.ring_job(8);
  CHECK(s.wait() == 0);
  pause_us(300'000);
  CHECK(s.ring.header().worker_asleep == 1);
  uint64_t before = cpu_time_ns(worker.pid);
  pause_us(1'500'000);
  uint64_t burnt = cpu_time_ns(worker.pid) - before;
  CHECK(burnt < 10 * kMs, "an idle worker burnt ", burnt, " ns in 1.5 s");
  uint64_t wakeups = s.ring.header().stats.wakeups;
  ft_client_wake(s.ring.memory.ring);
  for (int i = 0; i < 500 && ft::shared(s.ring.header().stats.wakeups).load() == wakeups; i++) pause_us(1000);
  CHECK(s.ring.header().stats.wakeups == wakeups + 1, s.ring.header().stats.wakeups);
}

// Precise, unlike usleep.
void busy_pause_us(uint64_t us) {
  for (uint64_t end = ft::now_ns() + us * 1000; ft::now_ns() < end;) ft::cpu_relax();
}

// The worker naps between jobs that nobody announces. A lost one would wait for FT_SLEEP_MAX_MS.
void silent_jobs_wait_no_longer_than_a_nap() {
  constexpr uint64_t kSpinNs = 200'000;
  Server s(kSpinNs);
  s.ring.header().nap_ns = kPatience;
  Worker worker(s.ring);
  worker.wait_ready();
  std::vector<uint64_t> waits;
  for (int i = 0; i < 100; i++) {
    pause_us(10 * kSpinNs / 1000);
    uint64_t begin = ft::now_ns();
    s.ring_silently(1);
    CHECK(s.wait() == 0);
    s.check_results("after naps");
    waits.push_back(s.ring.block(s.seq).started_ns - begin);
  }
  std::sort(waits.begin(), waits.end());
  CHECK(waits[50] < 5 * kMs && waits[99] < 500 * kMs, "median ", waits[50], " most ", waits[99]);
  uint64_t before = cpu_time_ns(worker.pid);
  pause_us(500'000);
  uint64_t burnt = cpu_time_ns(worker.pid) - before;
  CHECK(burnt < 250 * kMs, "a napping worker burnt ", burnt, " ns in 0.5 s");
  CHECK(s.ring.header().stats.sleeps == 0 && s.ring.header().worker_asleep == 0);
  printf("silent jobs: median %.0f us after the doorbell; napping takes %.0f %% of a core\n",
         double(waits[50]) / 1e3, double(burnt) / 5e6);
}

// Whether the second of two threads runs or waits for a core; a sleeper does neither.
bool helper_is_awake(pid_t pid) {
  for (auto& task : std::filesystem::directory_iterator(text("/proc/", pid, "/task"))) {
    if (task.path().filename() == std::to_string(pid)) continue;
    std::string stat;
    std::getline(std::ifstream(task.path() / "stat"), stat);
    return stat[stat.rfind(')') + 2] == 'R';
  }
  return false;
}

void jobs_after_naps_run_on_all_threads() {
  Server s(200'000, 2, 256, 192);
  s.ring.header().nap_ns = kPatience;
  Worker worker(s.ring, {"--isa", "scalar"});
  worker.wait_ready();
  int looks = 0, awake = 0;
  for (int i = 0; i < 20; i++) {
    pause_us(5'000);
    while (helper_is_awake(worker.pid)) pause_us(1'000);
    s.ring_silently(64);
    while (s.wait(0, 200'000) != 0) {
      looks++;
      awake += helper_is_awake(worker.pid);
    }
  }
  CHECK(looks > 20 && awake > looks / 2, "the helper was awake at ", awake, " of ", looks, " looks");
}

// Launches around the moment at which the worker gives up napping: each must find it awake or wake it,
// although the doorbell itself wakes nobody. A launch after which this thread got no CPU time for too long
// does not count.
void no_launch_finds_a_sleeper() {
  constexpr uint64_t kNapUs = 2'000;
  Server s(20'000);
  s.ring.header().nap_ns = kNapUs * 1000;
  Worker worker(s.ring);
  worker.wait_ready();
  uint64_t slow = 0, counted = 0;
  for (int i = 0; i < 1000 && slow < 5; i++) {
    busy_pause_us(kNapUs - 20 + s.random() % 150);
    uint64_t launched = ft::now_ns();
    ft_client_wake(s.ring.memory.ring);
    busy_pause_us(s.random() % 100);
    s.ring_silently(1);
    uint64_t rung = ft::now_ns();
    CHECK(s.wait() == 0);
    if (rung - launched > kNapUs * 1000 / 2) continue;
    counted++;
    slow += s.ring.block(s.seq).started_ns > rung + 300 * kMs;
  }
  const ft_stats& stats = s.ring.header().stats;
  printf("launches: %llu counted, %llu sleeps\n", static_cast<unsigned long long>(counted),
         static_cast<unsigned long long>(stats.sleeps));
  CHECK(slow == 0, slow, " jobs found a sleeper");
  CHECK(counted > 500 && stats.sleeps > 50, counted, " ", stats.sleeps);
}

// Thousands of jobs with pauses around the moment at which the worker falls asleep. A lost wake-up would show
// as a wait of up to FT_SLEEP_MAX_MS.
void no_wake_up_is_lost() {
  Server s(20'000);
  Worker worker(s.ring);
  worker.wait_ready();
  uint64_t slow = 0, start = ft::now_ns();
  for (int i = 0; i < 10000; i++) {
    busy_pause_us(15 + s.random() % 20);
    uint64_t begin = ft::now_ns();
    s.ring_job(1);
    CHECK(s.wait(s.random() % 2 ? 0 : 30'000) == 0);
    slow += ft::now_ns() - begin > 700 * kMs;
    if (i % 50 == 0) s.check_results("stress");
  }
  CHECK(slow == 0, slow, " jobs waited for the worker's own alarm");
  const ft_stats& stats = s.ring.header().stats;
  CHECK(stats.jobs == 10000 && stats.sleeps > 100, stats.sleeps);
  printf("stress: 10000 jobs, %llu sleeps, %.1f s\n", static_cast<unsigned long long>(stats.sleeps),
         double(ft::now_ns() - start) / 1e9);
}

// A sleeping waiter is woken by the worker, not by its own alarm of 20 ms.
void waiters_are_woken() {
  Server s(50'000, 2, 256, 192);
  Worker worker(s.ring, {"--isa", "scalar"});
  worker.wait_ready();
  std::vector<uint64_t> late;
  for (int i = 0; i < 40; i++) {
    s.ring_job(16);
    CHECK(s.wait(0) == 0);
    late.push_back(ft::now_ns() - s.ring.block(s.seq).finished_ns);
  }
  std::sort(late.begin(), late.end());
  CHECK(late[10] < 5 * kMs, late[10], " ns from the end of a job to its waiter");
}

// Starts a worker that must refuse; returns what it wrote to stderr.
std::string refusal(TestRing& ring, const std::vector<std::string>& extra) {
  int ends[2];
  if (pipe2(ends, O_CLOEXEC)) abort();
  Worker worker(ring, extra, ends[1]);
  close(ends[1]);
  int status = worker.wait_exit();
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 2, "status ", status);
  char buffer[1024];
  ssize_t n = read(ends[0], buffer, sizeof(buffer));
  close(ends[0]);
  return std::string(buffer, n > 0 ? size_t(n) : 0);
}

void rings_that_cannot_be_served_are_refused() {
  auto refuse = [](const char* word, const std::function<void(ft_ring_header&)>& spoil) {
    Server s;
    spoil(s.ring.header());
    std::string said = refusal(s.ring, {});
    CHECK(said.find(word) != std::string::npos, "said: ", said);
    CHECK(s.ring.header().worker_state == (s.ring.header().magic == FT_RING_MAGIC ? FT_WORKER_REFUSED : 0));
  };
  refuse("not a ring", [](ft_ring_header& h) { h.magic = 1; });
  refuse("version 9", [](ft_ring_header& h) { h.version = 9; });
  refuse("pool file is shorter", [](ft_ring_header& h) { h.pool_bytes *= 2; });
  refuse("ring file is shorter", [](ft_ring_header& h) { h.ring_bytes += 1; });
  refuse("blocks", [](ft_ring_header& h) { h.num_blocks = 0; });
  refuse("blocks", [](ft_ring_header& h) { h.num_blocks = UINT32_MAX; });
  refuse("blocks", [](ft_ring_header& h) { h.blocks_offset = UINT64_MAX / 64 * 64; });
  refuse("layers", [](ft_ring_header& h) { h.num_layers = FT_MAX_LAYERS + 1; });
  refuse("weights", [](ft_ring_header& h) { h.max_rows = 1 << 20; });
  refuse("results", [](ft_ring_header& h) { h.results_offset = 0; });
  refuse("end of a block", [](ft_ring_header& h) { h.block_stride = 64; });
  Server s;
  CHECK(refusal(s.ring, {"--isa", "mmx"}).find("--isa mmx") != std::string::npos);
  CHECK(refusal(s.ring, {"--pool-fd", "999"}).find("999") != std::string::npos);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return fprintf(stderr, "usage: protocol_test PATH_OF_CPU_WORKER [TEST]\n"), 2;
  worker_path = argv[1];
  struct {
    const char* name;
    void (*run)();
  } tests[] = {{"jobs_run_and_are_counted", jobs_run_and_are_counted},
               {"jobs_may_be_rung_ahead", jobs_may_be_rung_ahead},
               {"bad_jobs_end_with_a_status", bad_jobs_end_with_a_status},
               {"bad_layers_are_refused", bad_layers_are_refused},
               {"garbage_is_answered", garbage_is_answered},
               {"commands_answer", commands_answer},
               {"killed_workers_resume", killed_workers_resume},
               {"stalled_workers_are_noticed", stalled_workers_are_noticed},
               {"workers_die_with_their_parent", workers_die_with_their_parent},
               {"idle_workers_sleep", idle_workers_sleep},
               {"silent_jobs_wait_no_longer_than_a_nap", silent_jobs_wait_no_longer_than_a_nap},
               {"jobs_after_naps_run_on_all_threads", jobs_after_naps_run_on_all_threads},
               {"no_launch_finds_a_sleeper", no_launch_finds_a_sleeper},
               {"no_wake_up_is_lost", no_wake_up_is_lost},
               {"waiters_are_woken", waiters_are_woken},
               {"rings_that_cannot_be_served_are_refused", rings_that_cannot_be_served_are_refused}};
  size_t cases = 0;
  for (auto& test : tests) {
    if (argc > 2 && std::string(argv[2]) != test.name) continue;
    printf("%s\n", test.name);
    fflush(stdout);
    test.run();
    cases++;
  }
  return report("protocol", cases);
}
