// One of two tasks that do together what the interface for C++ offers: `two_tasks SERVICE TASK`.
#include <atomic>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <thread>
#include <type_traits>
#include <typeinfo>

#include "muster.hpp"

using namespace std::chrono_literals;

static_assert(std::is_move_constructible_v<muster::Agent> && !std::is_copy_constructible_v<muster::Agent>);
static_assert(std::is_move_assignable_v<muster::Buffer> && !std::is_copy_assignable_v<muster::Buffer>);
static_assert(std::is_nothrow_move_constructible_v<muster::Transfer>);
static_assert(!std::is_copy_constructible_v<muster::Cancellation> && !std::is_copy_constructible_v<muster::Prepared>);
static_assert(std::is_base_of_v<std::runtime_error, muster::Error> && std::is_base_of_v<muster::Error, muster::Deadline>);

#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            std::cerr << __FILE__ << ":" << __LINE__ << ": not so: " #condition << std::endl;                          \
            std::exit(1);                                                                                              \
        }                                                                                                              \
    } while (false)

// Checks that `call` throws `Exception`, and returns the exception.
template <typename Exception, typename Call>
static Exception throws(Call call) {
    try {
        call();
    } catch (const Exception &error) {
        CHECK(typeid(error) == typeid(Exception));
        return error;
    }
    std::cerr << "no " << typeid(Exception).name() << " was thrown" << std::endl;
    std::exit(1);
}

static const auto patience = 60s;

static void share_keys(muster::Agent &agent, std::uint32_t task) {
    const std::string own = "shared/" + std::to_string(task), other = "shared/" + std::to_string(1 - task);
    const std::string bytes("\0bytes\xff", 7);
    agent.put(own, bytes);
    CHECK(agent.get(other, patience) == bytes);
    CHECK(!agent.try_get("shared/nothing"));
    const auto refused = throws<muster::Refused>([&] { agent.put(own, "other"); });
    CHECK(refused.service_code() == 6 && refused.name() == "REFUSED" && !refused.task());
    // Neither writes its key again before the other has read it.
    agent.barrier("read");
    agent.put(own, "", true);
    CHECK(agent.try_get(own) == "");
    agent.barrier("written");
    CHECK((agent.list("shared") == std::map<std::string, std::string>{{"shared/0", ""}, {"shared/1", ""}}));
    agent.barrier("listed");
    if (task == 0) {
        agent.erase("shared");
    }
    agent.barrier("deleted");
    CHECK(agent.list("shared").empty());
    throws<muster::Deadline>([&] { agent.get("nothing", 50ms); });
    throws<muster::SettingsError>([&] { agent.get(std::string_view("a\0b", 3)); });
    throws<muster::SettingsError>([&] { agent.get("nothing", -1ms); });
}

static void see_members(muster::Agent &agent) {
    auto members = agent.connected();
    while (members.size() != 2) {
        members = agent.watch(members, patience);
    }
    CHECK(agent.live_set(patience) == members);
    CHECK((members[agent.task()] == muster::Member{agent.task(), agent.incarnation()}));
    throws<muster::Deadline>([&] { agent.watch(members, 50ms); });
}

static void exchange(muster::Agent &agent, std::uint32_t task) {
    const std::size_t count = 300'001;
    const std::uint32_t here = muster::device(task), there = muster::device(1 - task);
    std::vector<float> values(count);
    std::iota(values.begin(), values.end(), static_cast<float>(task));
    muster::Buffer out = muster::Buffer::own(std::move(values));
    muster::Buffer in(count * sizeof(float));
    CHECK(out.as<float>().size() == count && in.bytes().size() == count * sizeof(float));
    std::vector<muster::TransferSpec> specs{muster::TransferSpec::send(out, here, there, 7),
                                            muster::TransferSpec::receive(in, there, here, 7)};
    muster::Transfer transfer = agent.transfer(specs);
    const muster::TransferStats stats = transfer.wait(patience);
    CHECK(stats.sent == count * sizeof(float) && stats.received == stats.sent);
    CHECK(transfer.poll() && transfer.poll_one(1));
    float wanted = static_cast<float>(1 - task);
    for (float value : in.as<float>()) {
        CHECK(value == wanted);
        wanted += 1;
    }

    muster::LaunchOptions options;
    options.channel = 1;
    options.deadline = patience;
    options.priority = MUSTER_CLASS_LATENCY;
    muster::Prepared prepared = agent.prepare(specs, options);
    for (int round = 0; round < 3; ++round) {
        out.as<float>()[0] = static_cast<float>(round);
        prepared.launch().wait(patience);
        CHECK(in.as<float>()[0] == static_cast<float>(round));
    }

    // Both sides must agree on the layout.
    muster::TransferSpec part = task == 0 ? specs[0] : specs[1];
    part.size = 60;
    part.layout = muster::array_layout("float32", 4, {3, 5}, task == 0 ? "rows" : "columns");
    throws<muster::TransferError>([&] { agent.transfer({part}).wait(patience); });

    // A transfer that is cancelled, and memory whose release is told once the transfer is over.
    std::atomic<int> released = 0;
    {
        std::vector<unsigned char> memory(1000, 0x5a);
        muster::Transfer pending = [&] {
            muster::Buffer mine = muster::Buffer::attach(memory.data(), memory.size(), [&] { ++released; });
            muster::TransferSpec never = muster::TransferSpec::receive(mine, there, here, 8);
            muster::LaunchOptions alone;
            alone.channel = 2 + task;
            return agent.transfer({never}, alone);
        }();
        CHECK(!pending.poll() && released == 0);
        throws<muster::Deadline>([&] { pending.wait(0ms); });
        pending.cancel("it is not needed");
        throws<muster::TransferCancelled>([&] { pending.wait(); });
        CHECK(memory[0] == 0x5a);
    }
    for (int waited = 0; released != 1; ++waited) {
        CHECK(waited < 60'000);
        std::this_thread::sleep_for(1ms);
    }
    const muster::Error refused = throws<muster::TransferError>([&] { agent.send(out, 9, 1).wait(); });
    CHECK(refused.status() == MUSTER_STATUS_UNKNOWN_DEVICE);
    throws<muster::TransferError>([&] { agent.transfer({}).wait(patience); });
}

static void cancel_waits(muster::Agent &agent) {
    muster::Cancellation stop;
    std::thread waiter([&] { throws<muster::Interrupted>([&] { agent.get("nothing", patience, &stop); }); });
    std::this_thread::sleep_for(20ms);
    stop.cancel();
    waiter.join();
    throws<muster::Interrupted>([&] { agent.barrier("nobody", patience, {}, &stop); });
}

static void save_together(muster::Agent &agent, std::uint32_t task) {
    std::uint64_t step = 0;
    CHECK(!agent.reached_sync_point(step) && !agent.notice());
    agent.barrier("before the drain");
    if (task == 1) {
        agent.drain();
    }
    while (!agent.reached_sync_point(++step, patience)) {
        std::this_thread::sleep_for(1ms);
    }
    CHECK(agent.notice());
    agent.put("step/" + std::to_string(task), std::to_string(step));
    CHECK(agent.get("step/" + std::to_string(1 - task)) == std::to_string(step));
}

int main(int argc, char **argv) {
    CHECK(argc == 3);
    const auto task = static_cast<std::uint32_t>(std::atoi(argv[2]));
    muster::JoinOptions options;
    options.service = "127.0.0.1:1";
    options.task = task;
    try {
        muster::join(options, 100ms);
        CHECK(false);
    } catch (const muster::ServiceUnreachable &) {
    } catch (const muster::Deadline &) {
        // The last attempt may be cut short by the timeout.
    }
    options.task.reset();
    throws<muster::ClusterEnvError>([&] { muster::join(options, 100ms); });
    {
        options.service = argv[1];
        options.task = task;
        options.tasks = 2;
        muster::Agent joined = muster::join(options, patience);
        muster::Agent agent = std::move(joined);
        throws<muster::InvalidHandle>([&] { joined.barrier("moved"); });
        CHECK(agent.task() == task && agent.tasks() == 2 && agent.incarnation() != 0 && agent.run() != 0);
        CHECK(agent.barrier("start", patience) == 0 && agent.barrier("start", patience) == 1);
        agent.barrier(task == 0 ? "alone/0" : "alone/1", patience, {task});
        share_keys(agent, task);
        see_members(agent);
        agent.wait_for_engines(patience);
        exchange(agent, task);
        cancel_waits(agent);
        save_together(agent, task);
        agent.wait_for_end(0ms);
        agent.barrier("end", patience);
        agent.leave(patience);
        throws<muster::StaleIncarnation>([&] { agent.barrier("late"); });
        agent.end();
        throws<muster::InvalidHandle>([&] { static_cast<void>(agent.connected()); });
    }
    CHECK(muster_handle_count() == 0);
    std::cout << "DONE " << task << std::endl;
    return 0;
}
