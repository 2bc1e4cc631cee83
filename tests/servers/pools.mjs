// A client with a pool: `pools.mjs rounds URL WORKERS`, as `rounds` of go/pools.go, on Node's own agent.
import { Agent, get } from 'node:http'
import { createInterface } from 'node:readline'

const [, , , url, workers] = process.argv
const agent = new Agent({ keepAlive: true, maxSockets: Number(workers) })

// ECONNRESET is the server's close, and ECONNABORTED that of the client's node (docs/paths.md).
const closed = ['ECONNRESET', 'ECONNABORTED']

const ask = () => new Promise((resolve, reject) => {
  const request = get(url, { agent }, (response) => {
    response.resume()
    response.on('error', reject)
    response.on('end', () => {
      if (response.statusCode === 200) resolve(response.headers['x-pod'])
      else reject(new Error(`status ${response.statusCode}`))
    })
  })
  request.on('error', (error) => {
    // As Node's documentation advises: an idle connection was closed.
    if (request.reusedSocket && closed.includes(error.code)) resolve(ask())
    else reject(error)
  })
})

const round = async (requests) => {
  let left = requests
  let failed = 0
  const served = new Map()
  const work = async () => {
    while (left-- > 0) {
      try {
        const pod = await ask()
        served.set(pod, (served.get(pod) ?? 0) + 1)
      } catch (error) {
        failed++
        console.error(error)
      }
    }
  }
  await Promise.all(Array.from({ length: Number(workers) }, work))
  return [failed, ...Array.from(served, ([pod, count]) => `${pod}=${count}`)].join(' ')
}

for await (const line of createInterface({ input: process.stdin })) console.log(await round(Number(line)))
process.exit(0)
