// Muster for C++17: the interface of muster.h with RAII, exceptions, std::chrono and std::string_view.
//
// - Agent, Buffer, Prepared, Transfer and Cancellation own a handle. They can be moved and not copied; their destructors free
//   it. The destructor of an Agent ends the incarnation without leaving the job, as a process that dies does: call leave().
// - Every failure is an exception: Error, a std::runtime_error with the status, or a class derived from it.
// - Every wait has a timeout, of std::chrono, and takes a Cancellation, which may be nullptr.
// - A moved-from object may be destroyed and assigned to; every other use throws InvalidHandle.
#ifndef MUSTER_HPP
#define MUSTER_HPP

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "muster.h"

namespace muster {

// The base of all exceptions of Muster. The text says what to do next.
class Error : public std::runtime_error {
public:
    Error(muster_status status, const std::string &text, int service_code = 0, std::int64_t task = -1)
        : std::runtime_error(text), status_(status), service_code_(service_code), task_(task) {}

    // Returns the status.
    muster_status status() const noexcept { return status_; }
    // Returns the name of the status, for example "TIMED_OUT".
    std::string_view name() const noexcept { return muster_status_name(status_); }
    // Returns the status of gRPC, if the service stated the error; 0 otherwise.
    int service_code() const noexcept { return service_code_; }
    // Returns the task that the error names, if it names one.
    std::optional<std::uint32_t> task() const noexcept {
        return task_ < 0 ? std::nullopt : std::optional<std::uint32_t>(static_cast<std::uint32_t>(task_));
    }

private:
    muster_status status_;
    int service_code_;
    std::int64_t task_;
};

// An argument, a file or an option cannot be used.
class SettingsError : public Error {
public:
    using Error::Error;
};

// The place of this process in its job is unknown, or two sources disagree about it.
class ClusterEnvError : public SettingsError {
public:
    using SettingsError::SettingsError;
};

// The object was moved from, or its agent was destroyed by another thread.
class InvalidHandle : public Error {
public:
    using Error::Error;
};

// The wait was ended by its Cancellation.
class Interrupted : public Error {
public:
    using Error::Error;
};

// No Muster answers at the address.
class ServiceUnreachable : public Error {
public:
    using Error::Error;
};

// A wait was not over within its timeout.
class Deadline : public Error {
public:
    using Error::Error;
};

// Not all tasks of the job have registered within the timeout; the text names those that have not.
class TasksMissing : public Deadline {
public:
    using Deadline::Deadline;
};

// The service has answered with an error.
class Refused : public Error {
public:
    using Error::Error;
};

// This incarnation of the task is over, or has left: join again.
class StaleIncarnation : public Error {
public:
    using Error::Error;
};

// A transfer failed, or its request was refused. Its memory is not used any more.
class TransferError : public Error {
public:
    using Error::Error;
};

// The peer of a transfer is gone, or is another incarnation now.
class PeerDead : public TransferError {
public:
    using TransferError::TransferError;
};

// A program of one side cancelled the transfer.
class TransferCancelled : public TransferError {
public:
    using TransferError::TransferError;
};

namespace detail {

[[noreturn]] inline void throw_error(muster_status status, const std::string &text, int service_code, std::int64_t task) {
    switch (status) {
    case MUSTER_STATUS_CLUSTER_ENV:
        throw ClusterEnvError(status, text, service_code, task);
    case MUSTER_STATUS_INVALID_ARGUMENT:
    case MUSTER_STATUS_SETTINGS:
    case MUSTER_STATUS_TLS:
        throw SettingsError(status, text, service_code, task);
    case MUSTER_STATUS_INVALID_HANDLE:
        throw InvalidHandle(status, text, service_code, task);
    case MUSTER_STATUS_INTERRUPTED:
        throw Interrupted(status, text, service_code, task);
    case MUSTER_STATUS_UNREACHABLE:
        throw ServiceUnreachable(status, text, service_code, task);
    case MUSTER_STATUS_TASKS_MISSING:
        throw TasksMissing(status, text, service_code, task);
    case MUSTER_STATUS_TIMED_OUT:
    case MUSTER_STATUS_INCOMPLETE_LIVE_SET:
        throw Deadline(status, text, service_code, task);
    case MUSTER_STATUS_REFUSED:
        throw Refused(status, text, service_code, task);
    case MUSTER_STATUS_RUN_CHANGED:
    case MUSTER_STATUS_LIFE_ENDED:
    case MUSTER_STATUS_ENDED:
        throw StaleIncarnation(status, text, service_code, task);
    case MUSTER_STATUS_PEER_DEAD:
    case MUSTER_STATUS_STALE_INCARNATION:
        throw PeerDead(status, text, service_code, task);
    case MUSTER_STATUS_CANCELLED:
        throw TransferCancelled(status, text, service_code, task);
    default:
        // The ranges of muster.h: transfers, requests and memory begin at 200.
        if (status >= MUSTER_STATUS_PEER_DEAD) {
            throw TransferError(status, text, service_code, task);
        }
        throw Error(status, text, service_code, task);
    }
}

// Throws the error of a call of this thread that failed.
inline void check(muster_status status) {
    if (status != MUSTER_STATUS_OK) {
        throw_error(status, muster_error_message(), muster_error_service_code(), muster_error_task());
    }
}

// Returns a text that ends with NUL, which a view need not do.
inline std::string text(std::string_view view) {
    if (view.find('\0') != std::string_view::npos) {
        throw SettingsError(MUSTER_STATUS_INVALID_ARGUMENT, "a text contains NUL");
    }
    return std::string(view);
}

inline const char *optional_text(const std::optional<std::string> &text) { return text ? text->c_str() : nullptr; }

// Frees a value of the library at the end of its scope.
template <typename Value, muster_status (*free_value)(Value *)>
struct Owned : Value {
    Owned() : Value() {}
    Owned(const Owned &) = delete;
    Owned &operator=(const Owned &) = delete;
    ~Owned() { free_value(this); }
};

using Bytes = Owned<muster_bytes, muster_bytes_free>;
using Members = Owned<muster_members, muster_members_free>;
using Entries = Owned<muster_entries, muster_entries_free>;

template <typename Handle, muster_status (*free_handle)(Handle *)>
struct FreeHandle {
    void operator()(Handle *handle) const noexcept { free_handle(handle); }
};

template <typename Handle, muster_status (*free_handle)(Handle *)>
using Unique = std::unique_ptr<Handle, FreeHandle<Handle, free_handle>>;

} // namespace detail

// A timeout. Every duration that is a whole number of milliseconds converts to it.
using Timeout = std::chrono::milliseconds;

// The timeout of a wait that names none, as in Python.
inline constexpr Timeout default_timeout = std::chrono::minutes(5);

// A contiguous range of objects that belong to another owner.
template <typename T>
class Span {
public:
    constexpr Span() noexcept = default;
    constexpr Span(T *data, std::size_t size) noexcept : data_(data), size_(size) {}

    constexpr T *data() const noexcept { return data_; }
    constexpr std::size_t size() const noexcept { return size_; }
    constexpr bool empty() const noexcept { return size_ == 0; }
    constexpr T *begin() const noexcept { return data_; }
    constexpr T *end() const noexcept { return data_ + size_; }
    constexpr T &operator[](std::size_t at) const noexcept { return data_[at]; }

private:
    T *data_ = nullptr;
    std::size_t size_ = 0;
};

// Ends waits of other threads.
class Cancellation {
public:
    Cancellation() {
        muster_cancellation *made = nullptr;
        detail::check(muster_cancellation_new(&made));
        handle_.reset(made);
    }

    // Ends all waits with this, also those that begin later, with Interrupted. Do not call it in a signal handler.
    void cancel() { detail::check(muster_cancellation_cancel(handle_.get())); }

    // Returns the handle of muster.h, which this keeps.
    const muster_cancellation *native_handle() const noexcept { return handle_.get(); }

private:
    detail::Unique<muster_cancellation, muster_cancellation_free> handle_;
};

namespace detail {
inline const muster_cancellation *get(const Cancellation *cancellation) noexcept {
    return cancellation == nullptr ? nullptr : cancellation->native_handle();
}
} // namespace detail

// A task in one of its incarnations.
struct Member {
    std::uint32_t task = 0;
    std::uint64_t incarnation = 0;

    friend bool operator==(const Member &a, const Member &b) noexcept {
        return a.task == b.task && a.incarnation == b.incarnation;
    }
    friend bool operator!=(const Member &a, const Member &b) noexcept { return !(a == b); }
    friend bool operator<(const Member &a, const Member &b) noexcept {
        return std::tie(a.task, a.incarnation) < std::tie(b.task, b.incarnation);
    }
};

namespace detail {
inline std::vector<Member> to_vector(const muster_members &members) {
    std::vector<Member> all;
    all.reserve(members.len);
    for (std::size_t at = 0; at < members.len; ++at) {
        all.push_back(Member{members.items[at].task, members.items[at].incarnation});
    }
    return all;
}
} // namespace detail

// How a task joins: the fields of muster_join_options.
struct JoinOptions {
    // HOST:PORT; without it, as `muster worker` finds it.
    std::optional<std::string> service;
    std::optional<std::string> job;
    std::optional<std::uint32_t> task;
    std::optional<std::uint32_t> tasks;
    Timeout heartbeat_timeout = std::chrono::seconds(100);
    std::optional<std::string> ca;
    std::optional<std::string> cert;
    std::optional<std::string> key;
    std::uint32_t devices = 1;
    std::uint32_t transport = MUSTER_TRANSPORT_AUTO;
    std::optional<std::string> listen;
    std::optional<std::string> advertise;
    std::string token;
    std::optional<std::string> transfer_cert;
    std::optional<std::string> transfer_key;
    std::optional<std::string> transfer_ca;
    bool insecure_transfers = false;
};

// The amounts that a launch has moved.
struct TransferStats {
    std::uint64_t sent = 0;
    std::uint64_t received = 0;
    std::chrono::microseconds elapsed{0};
};

namespace detail {
inline TransferStats to_stats(const muster_transfer_stats &stats) {
    return TransferStats{stats.sent, stats.received, std::chrono::microseconds(stats.elapsed_us)};
}
} // namespace detail

// Memory that transfers read and write. Destroying it does not disturb transfers: they keep the memory until they are over.
class Buffer {
public:
    // Allocates shared memory, all zero: the fastest for tasks on this host.
    explicit Buffer(std::size_t size) {
        muster_buffer *made = nullptr;
        detail::check(muster_buffer_allocate(size, &made));
        handle_.reset(made);
    }

    // Registers memory of the program, without a copy. It must stay valid until `release` is called, on any thread: when this
    // is destroyed and no transfer uses it. `release` must not throw and must not use Muster.
    static Buffer attach(void *data, std::size_t size, std::function<void()> release = nullptr) {
        auto kept = std::make_unique<std::function<void()>>(std::move(release));
        muster_buffer *made = nullptr;
        detail::check(muster_buffer_register(data, size, &Buffer::call_release, kept.get(), &made));
        static_cast<void>(kept.release());
        return Buffer(made);
    }

    // Registers a vector, which belongs to the buffer from now on. T is a plain type, such as float.
    template <typename T>
    static Buffer own(std::vector<T> values) {
        static_assert(std::is_trivially_copyable_v<T>, "transfers copy bytes");
        auto kept = std::make_shared<std::vector<T>>(std::move(values));
        void *data = kept->data();
        const std::size_t size = kept->size() * sizeof(T);
        return attach(data, size, [kept] {});
    }

    // Returns the bytes. From the launch of a transfer to its outcome, or to the proof that its cancellation is complete, do not
    // write what is sent, and do not use what is received.
    Span<unsigned char> bytes() const { return as<unsigned char>(); }

    // Returns the memory as objects of a plain type, as many as fit.
    template <typename T>
    Span<T> as() const {
        static_assert(std::is_trivially_copyable_v<T>, "transfers copy bytes");
        void *data = nullptr;
        std::size_t size = 0;
        detail::check(muster_buffer_data(handle_.get(), &data, &size));
        return Span<T>(static_cast<T *>(data), size / sizeof(T));
    }

    // Returns the handle of muster.h, which this keeps.
    const muster_buffer *native_handle() const noexcept { return handle_.get(); }

private:
    explicit Buffer(muster_buffer *made) noexcept : handle_(made) {}

    static void call_release(void *context, void *, std::size_t) {
        const std::unique_ptr<std::function<void()>> release(static_cast<std::function<void()> *>(context));
        if (*release) {
            (*release)();
        }
    }

    detail::Unique<muster_buffer, muster_buffer_free> handle_;
};

// A request of one transfer. `of` is the memory; `from` and `to` are devices (muster::device); both sides name the same key,
// devices, size and layout.
struct TransferSpec {
    std::uint32_t direction = MUSTER_SEND;
    std::uint32_t from = 0;
    std::uint32_t to = 0;
    std::uint64_t key = 0;
    const Buffer *of = nullptr;
    std::size_t offset = 0;
    std::size_t size = 0;
    std::uint64_t layout = 0;

    // A send of a whole buffer.
    static TransferSpec send(const Buffer &buffer, std::uint32_t from, std::uint32_t to, std::uint64_t key) {
        return TransferSpec{MUSTER_SEND, from, to, key, &buffer, 0, buffer.bytes().size(), 0};
    }
    // A receive into a whole buffer.
    static TransferSpec receive(const Buffer &buffer, std::uint32_t from, std::uint32_t to, std::uint64_t key) {
        return TransferSpec{MUSTER_RECEIVE, from, to, key, &buffer, 0, buffer.bytes().size(), 0};
    }
};

// The options of a launch: the fields of muster_launch_options.
struct LaunchOptions {
    std::uint32_t channel = 0;
    std::uint32_t priority = MUSTER_CLASS_NORMAL;
    std::optional<Timeout> deadline;
    Timeout stall = std::chrono::seconds(30);
};

namespace detail {
inline std::vector<muster_transfer_spec> to_specs(const std::vector<TransferSpec> &specs) {
    std::vector<muster_transfer_spec> all;
    all.reserve(specs.size());
    for (const TransferSpec &spec : specs) {
        const muster_buffer *buffer = spec.of == nullptr ? nullptr : spec.of->native_handle();
        all.push_back(muster_transfer_spec{spec.direction, spec.from, spec.to, 0, spec.key, buffer, spec.offset, spec.size,
                                           spec.layout});
    }
    return all;
}

inline muster_launch_options to_options(const LaunchOptions &options) {
    muster_launch_options all;
    check(muster_launch_options_init(&all, sizeof all));
    all.channel = options.channel;
    all.priority = options.priority;
    all.deadline_ms = options.deadline ? options.deadline->count() : -1;
    all.stall_ms = options.stall.count();
    return all;
}
} // namespace detail

// Transfers in flight. Destroying it does not cancel them; they keep their memory until they are over.
class Transfer {
public:
    // Waits for the outcome of all of them. After Deadline and Interrupted the launch goes on; after any other outcome the
    // memory may be used again.
    TransferStats wait(Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        muster_transfer_stats stats;
        detail::check(muster_transfer_wait(handle_.get(), timeout.count(), detail::get(cancellation), &stats));
        return detail::to_stats(stats);
    }

    // Returns the outcome; nothing while the launch goes on. It does not wait.
    std::optional<TransferStats> poll() {
        muster_transfer_stats stats;
        bool is_over = false;
        detail::check(muster_transfer_poll(handle_.get(), &is_over, &stats));
        return is_over ? std::optional<TransferStats>(detail::to_stats(stats)) : std::nullopt;
    }

    // Returns whether the transfer with this index in the request is over. It does not wait.
    bool poll_one(std::size_t index) {
        bool is_over = false;
        detail::check(muster_transfer_poll_one(handle_.get(), index, &is_over));
        return is_over;
    }

    // Cancels what has not moved yet, and waits for the proof that no byte can land any more, here and at the peers. Once it has
    // returned, the memory may be used again. After Deadline call it again to go on waiting.
    void cancel(std::string_view reason, Timeout timeout = default_timeout) {
        detail::check(muster_transfer_cancel(handle_.get(), detail::text(reason).c_str(), timeout.count()));
    }

private:
    friend class Agent;
    friend class Prepared;
    explicit Transfer(muster_transfer *made) noexcept : handle_(made) {}

    detail::Unique<muster_transfer, muster_transfer_free> handle_;
};

// Transfers whose slow work is done, so that they can be launched many times.
class Prepared {
public:
    // Launches them and returns at once.
    Transfer launch() {
        muster_transfer *made = nullptr;
        detail::check(muster_launch(handle_.get(), &made));
        return Transfer(made);
    }

private:
    friend class Agent;
    explicit Prepared(muster_prepared *made) noexcept : handle_(made) {}

    detail::Unique<muster_prepared, muster_prepared_free> handle_;
};

// Returns the number of a device: the `ordinal`-th of a task.
inline std::uint32_t device(std::uint32_t task, std::uint32_t ordinal = 0) noexcept { return muster_device(task, ordinal); }

// Returns the fingerprint of the layout of an array.
inline std::uint64_t array_layout(std::string_view element, std::uint64_t width, const std::vector<std::uint64_t> &shape,
                                  std::string_view sharding = "") {
    std::uint64_t layout = 0;
    detail::check(muster_array_layout(detail::text(element).c_str(), width, shape.data(), shape.size(),
                                      detail::text(sharding).c_str(), &layout));
    return layout;
}

// One incarnation of a task. muster::join makes one.
class Agent {
public:
    std::uint32_t task() const { return identity().task; }
    std::uint32_t tasks() const { return identity().tasks; }
    std::uint64_t incarnation() const { return identity().incarnation; }
    std::uint64_t run() const { return identity().run; }

    // Waits until this incarnation has ended without leaving, and throws the reason; returns when the timeout has passed.
    void wait_for_end(Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        const muster_status status = muster_wait_for_end(handle_.get(), timeout.count(), detail::get(cancellation));
        if (status != MUSTER_STATUS_TIMED_OUT) {
            detail::check(status);
        }
    }

    // Waits at a barrier until all tasks have come, or those of `tasks`. Returns how often this incarnation has passed it
    // before.
    std::int64_t barrier(std::string_view name, Timeout timeout = default_timeout,
                         const std::vector<std::uint32_t> &tasks = {}, const Cancellation *cancellation = nullptr) {
        std::int64_t instance = 0;
        detail::check(muster_barrier(handle_.get(), detail::text(name).c_str(), tasks.data(), tasks.size(), timeout.count(),
                                     detail::get(cancellation), &instance));
        return instance;
    }

    // Returns the live tasks, once every one of them has called this. All get the same answer.
    std::vector<Member> live_set(Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        detail::Members members;
        detail::check(muster_live_set(handle_.get(), timeout.count(), detail::get(cancellation), &members));
        return detail::to_vector(members);
    }

    // Writes a key, which must not exist unless `overwrite`.
    void put(std::string_view key, std::string_view value, bool overwrite = false, Timeout timeout = default_timeout,
             const Cancellation *cancellation = nullptr) {
        const auto *bytes = reinterpret_cast<const std::uint8_t *>(value.data());
        detail::check(muster_put(handle_.get(), detail::text(key).c_str(), bytes, value.size(), overwrite, timeout.count(),
                                 detail::get(cancellation)));
    }

    // Returns the value of a key, once it has one.
    std::string get(std::string_view key, Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        detail::Bytes value;
        detail::check(
            muster_get(handle_.get(), detail::text(key).c_str(), timeout.count(), detail::get(cancellation), &value));
        return to_string(value);
    }

    // Returns the value of a key, if it has one.
    std::optional<std::string> try_get(std::string_view key, Timeout timeout = default_timeout,
                                       const Cancellation *cancellation = nullptr) {
        detail::Bytes value;
        detail::check(
            muster_try_get(handle_.get(), detail::text(key).c_str(), timeout.count(), detail::get(cancellation), &value));
        return value.data == nullptr ? std::nullopt : std::optional<std::string>(to_string(value));
    }

    // Returns the keys below a directory with their values.
    std::map<std::string, std::string> list(std::string_view directory, Timeout timeout = default_timeout,
                                            const Cancellation *cancellation = nullptr) {
        detail::Entries entries;
        detail::check(muster_list(handle_.get(), detail::text(directory).c_str(), timeout.count(), detail::get(cancellation),
                                  &entries));
        std::map<std::string, std::string> all;
        for (std::size_t at = 0; at < entries.len; ++at) {
            const muster_entry &entry = entries.items[at];
            all.emplace(entry.key, std::string(reinterpret_cast<const char *>(entry.value), entry.len));
        }
        return all;
    }

    // Deletes a key and all keys below it.
    void erase(std::string_view key, Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        detail::check(
            muster_delete(handle_.get(), detail::text(key).c_str(), timeout.count(), detail::get(cancellation)));
    }

    // Returns the connected tasks, as far as this task has learned of them. It does not wait.
    std::vector<Member> connected() const {
        detail::Members members;
        detail::check(muster_connected(handle_.get(), &members));
        return detail::to_vector(members);
    }

    // Returns the connected tasks as soon as they differ from `known`.
    std::vector<Member> watch(const std::vector<Member> &known, Timeout timeout = default_timeout,
                              const Cancellation *cancellation = nullptr) {
        std::vector<muster_member> list;
        list.reserve(known.size());
        for (const Member &member : known) {
            list.push_back(muster_member{member.task, 0, member.incarnation});
        }
        detail::Members members;
        detail::check(muster_watch(handle_.get(), list.data(), list.size(), timeout.count(), detail::get(cancellation),
                                   &members));
        return detail::to_vector(members);
    }

    // Returns the preemption notice of the job, if there is one. It does not wait.
    std::optional<std::string> notice() const {
        detail::Bytes notice;
        detail::check(muster_notice(handle_.get(), &notice));
        return notice.data == nullptr ? std::nullopt : std::optional<std::string>(to_string(notice));
    }

    // Asks all tasks to agree on a step and save, as JAX does at SIGTERM.
    void drain(Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        detail::check(muster_drain(handle_.get(), timeout.count(), detail::get(cancellation)));
    }

    // Returns whether all tasks have agreed to save before `step`. Call it before each step, with its number.
    bool reached_sync_point(std::uint64_t step, Timeout timeout = default_timeout,
                            const Cancellation *cancellation = nullptr) {
        bool reached = false;
        detail::check(muster_reached_sync_point(handle_.get(), step, timeout.count(), detail::get(cancellation), &reached));
        return reached;
    }

    // Leaves the job: alone if it is recoverable, else together with all other tasks. If it throws, this incarnation continues.
    void leave(Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        detail::check(muster_leave(handle_.get(), timeout.count(), detail::get(cancellation)));
    }

    // Ends without telling the service, which then counts this task as lost unless it has left. The destructor does the same.
    void end() noexcept { handle_.reset(); }

    // Waits until the transfer engines of these tasks are known, or of all tasks. A transfer waits for its peers itself.
    void wait_for_engines(Timeout timeout = default_timeout, const std::vector<std::uint32_t> &tasks = {},
                          const Cancellation *cancellation = nullptr) {
        detail::check(muster_wait_for_engines(handle_.get(), tasks.data(), tasks.size(), timeout.count(),
                                              detail::get(cancellation)));
    }

    // Sends a whole buffer to a task, which receives it under the same key.
    Transfer send(const Buffer &buffer, std::uint32_t to_task, std::uint64_t key) {
        muster_transfer *made = nullptr;
        detail::check(muster_send(handle_.get(), buffer.native_handle(), to_task, key, &made));
        return Transfer(made);
    }

    // Receives a whole buffer from a task, which sends it under the same key.
    Transfer receive(const Buffer &buffer, std::uint32_t from_task, std::uint64_t key) {
        muster_transfer *made = nullptr;
        detail::check(muster_receive(handle_.get(), buffer.native_handle(), from_task, key, &made));
        return Transfer(made);
    }

    // Launches transfers together and returns at once.
    Transfer transfer(const std::vector<TransferSpec> &specs, const LaunchOptions &options = {}) {
        const auto list = detail::to_specs(specs);
        const auto chosen = detail::to_options(options);
        muster_transfer *made = nullptr;
        detail::check(muster_transfer_start(handle_.get(), list.data(), list.size(), &chosen, &made));
        return Transfer(made);
    }

    // Prepares transfers, so that each launch only moves bytes.
    Prepared prepare(const std::vector<TransferSpec> &specs, const LaunchOptions &options = {},
                     Timeout timeout = default_timeout, const Cancellation *cancellation = nullptr) {
        const auto list = detail::to_specs(specs);
        const auto chosen = detail::to_options(options);
        muster_prepared *made = nullptr;
        detail::check(muster_prepare(handle_.get(), list.data(), list.size(), &chosen, timeout.count(),
                                     detail::get(cancellation), &made));
        return Prepared(made);
    }

    // Returns the handle of muster.h, which this keeps.
    const muster_agent *native_handle() const noexcept { return handle_.get(); }

private:
    friend Agent join(const JoinOptions &, Timeout, const Cancellation *);
    explicit Agent(muster_agent *made) noexcept : handle_(made) {}

    muster_identity identity() const {
        muster_identity identity;
        detail::check(muster_agent_identity(handle_.get(), &identity));
        return identity;
    }

    static std::string to_string(const muster_bytes &value) {
        return std::string(reinterpret_cast<const char *>(value.data), value.len);
    }

    detail::Unique<muster_agent, muster_agent_free> handle_;
};

// Registers a new incarnation of a task, and waits until the service counts it as connected: in a run that is forming, until all
// tasks have registered.
inline Agent join(const JoinOptions &options = {}, Timeout timeout = default_timeout,
                  const Cancellation *cancellation = nullptr) {
    if (muster_abi_version() != MUSTER_ABI_VERSION) {
        throw Error(MUSTER_STATUS_OTHER, "libmuster.so has another binary interface than muster.h: install them together");
    }
    muster_join_options all;
    detail::check(muster_join_options_init(&all, sizeof all));
    all.service = detail::optional_text(options.service);
    all.job = detail::optional_text(options.job);
    all.task = options.task ? static_cast<std::int64_t>(*options.task) : -1;
    all.tasks = options.tasks ? static_cast<std::int64_t>(*options.tasks) : -1;
    all.heartbeat_timeout_ms = options.heartbeat_timeout.count();
    all.ca = detail::optional_text(options.ca);
    all.cert = detail::optional_text(options.cert);
    all.key = detail::optional_text(options.key);
    all.devices = options.devices;
    all.transport = options.transport;
    all.listen = detail::optional_text(options.listen);
    all.advertise = detail::optional_text(options.advertise);
    all.token = reinterpret_cast<const std::uint8_t *>(options.token.data());
    all.token_len = options.token.size();
    all.transfer_cert = detail::optional_text(options.transfer_cert);
    all.transfer_key = detail::optional_text(options.transfer_key);
    all.transfer_ca = detail::optional_text(options.transfer_ca);
    all.insecure_transfers = options.insecure_transfers ? 1 : 0;
    muster_agent *made = nullptr;
    detail::check(muster_join(&all, timeout.count(), detail::get(cancellation), &made));
    return Agent(made);
}

} // namespace muster

#endif // MUSTER_HPP
