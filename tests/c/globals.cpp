// Objects of static storage, destroyed at the end of the process while another thread waits: `globals SERVICE HOW`.
#include <cstdlib>
#include <iostream>
#include <optional>
#include <string_view>
#include <thread>

#include <muster.hpp>

using namespace std::chrono_literals;

static std::optional<muster::Agent> agent;
static std::optional<muster::Buffer> buffer;

int main(int argc, char **argv) {
    if (argc != 3) {
        return 2;
    }
    muster::JoinOptions options;
    options.service = argv[1];
    options.task = 0;
    agent = muster::join(options, 60s);
    buffer = muster::Buffer(1000);
    try {
        agent->get("nothing", 10ms);
        return 3;
    } catch (const muster::Deadline &) {
    }
    std::thread waiter([] {
        try {
            agent->get("nothing", 60s);
        } catch (const muster::InvalidHandle &) {
        }
    });
    waiter.detach();
    std::this_thread::sleep_for(50ms);
    std::cout << "DONE" << std::endl;
    if (argv[2] == std::string_view("exit")) {
        std::exit(0);
    }
    return 0;
}
